"""The JSON Schemas of all documents, for editors."""
