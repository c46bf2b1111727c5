"""What one machine is like, told by `python -m isthmus.sites.facts` to `doctor` and `launch`."""
