"""A bucket's way from the ranks to their gateway, and back."""
