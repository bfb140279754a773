"""UCC (Unified Collective Communication) as a library of torch.distributed, compiled on first use."""
