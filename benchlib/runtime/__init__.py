"""What stands under a rank: worker, process group, devices, timing, checkpoints, exchanges."""
