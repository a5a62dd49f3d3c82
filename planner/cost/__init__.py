"""What a strategy costs in time and memory: numpy terms over a batch of strategies, one implementation for every
caller."""
