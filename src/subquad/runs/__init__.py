"""What every long command shares: folder lock, atomic files, checkpoints, stopping, progress, workers, the machine record."""
