"""What every long command shares: folder lock, atomic files, stopping, progress, worker processes, machine record."""
