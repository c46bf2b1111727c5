"""Files that have other systems start a site's agent: `isthmus render`."""
