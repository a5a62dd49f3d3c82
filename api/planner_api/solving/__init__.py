"""Plans are made here: in processes of their own, taken from a queue, with limits."""
