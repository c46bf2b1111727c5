"""The trees along which gradients are summed, and their codecs. Pure."""
