"""What a request may ask for, checked by clients and by the worker."""
