"""The cost of training one model inside a site: seconds, bytes, money. See docs/cost-model.md."""
