"""Along which links gradients are summed, and with which codecs. Pure."""
