"""Memory that expert versions live in, behind one interface."""

from dynaexq.device.base import Arena, Device
from dynaexq.device.cpu import CpuDevice

__all__ = ["Arena", "CpuDevice", "Device"]
