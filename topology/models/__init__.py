"""The documents as users write them: pydantic models of topology and job."""
