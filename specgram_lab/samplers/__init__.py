"""Instrumented samplers: what was proposed, masked, admitted, verified, accepted, at every step."""
