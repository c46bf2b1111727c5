"""Where each kind of model hands its gradients over, and who holds which element of it."""
