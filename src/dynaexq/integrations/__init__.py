"""Bridges to other projects. Each imports its project; nothing else in dynaexq does."""
