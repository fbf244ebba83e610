"""How a run is sized, started, resumed, restarted and led over nodes. It imports no task."""
