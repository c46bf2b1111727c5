"""What crosses links, and when chunks that go over trees arrive. Pure."""
