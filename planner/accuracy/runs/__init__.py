"""From a published run to a question for the cost model: reading records, filling what they leave open, saying why
not."""
