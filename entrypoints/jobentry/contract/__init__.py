"""What the two halves leave for each other; the only part of jobentry that cloudjob may import."""
