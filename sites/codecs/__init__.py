"""Codecs: how a chunk of float32 travels."""
