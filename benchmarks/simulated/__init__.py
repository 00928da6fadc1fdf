"""What plays the workers of a very large job, and the programs that lead to them."""
