"""What a run left: metrics, run folders, the store."""
