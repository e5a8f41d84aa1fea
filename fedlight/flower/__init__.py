"""The same experiment on real devices: a federation whose clients are Flower's nodes.

Flower (https://flower.ai) brings the transport: SuperLink, SuperNodes, TLS, authentication of nodes, a simulation. The loop
makes the rounds: its server's half runs in a ServerApp and a client's half in a ClientApp, both with the objects of one
config. So a run ends with the same bits as the emulator's on a lossless channel.
"""
