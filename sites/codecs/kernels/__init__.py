"""The arithmetic of codecs and sums: loops that are compiled for the processor they run on."""
