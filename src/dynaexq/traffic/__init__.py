"""Router traffic: from the token path to the control loop."""

from dynaexq.traffic.recorder import RoutedLayer, Traffic, TrafficRecorder

__all__ = ["RoutedLayer", "Traffic", "TrafficRecorder"]
