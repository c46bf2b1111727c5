"""What training one model costs inside a site: seconds, bytes and money. docs/cost-model.md."""
