"""What runs in every process of a validation: the decoder, the strategy applied to it, its steps."""
