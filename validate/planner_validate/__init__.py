"""Short real runs of a plan with PyTorch: the only package of the product that imports torch.

Modules that the command line loads before a run is started import no torch themselves, so that a machine without it
gets a clear answer."""
