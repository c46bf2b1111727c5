"""What `isthmus bench` runs inside sites, and what it is compared with."""
