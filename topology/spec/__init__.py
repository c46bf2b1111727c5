"""What a user wrote, checked, as frozen values in base units; and what a run is, decided once."""
