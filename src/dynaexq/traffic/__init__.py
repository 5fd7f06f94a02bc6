"""Router traffic: from the token path to the control loop, and to disk."""

from dynaexq.traffic.meter import TrafficMeter
from dynaexq.traffic.profile import TrafficProfile, check_state_file
from dynaexq.traffic.recorder import RoutedLayer, Traffic, TrafficRecorder, check_signal

__all__ = [
    "RoutedLayer",
    "Traffic",
    "TrafficMeter",
    "TrafficProfile",
    "TrafficRecorder",
    "check_signal",
    "check_state_file",
]
