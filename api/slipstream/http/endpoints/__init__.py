"""What the routes of models lead to, whichever API they are of; resuming; the API's description."""
