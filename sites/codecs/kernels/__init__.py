"""The arithmetic of codecs and sums: loops over chunks that are compiled."""

from isthmus.sites.compiled import search_path

__path__ = search_path(__name__, __path__)
