"""The hot path of connections between gateways, which is compiled."""

from isthmus.sites.compiled import search_path

__path__ = search_path(__name__, __path__)
