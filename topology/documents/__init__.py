"""From documents to what a run uses: loaded, resolved, checked against each other, placed."""
