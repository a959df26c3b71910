"""Every message and shape of the wire, as typed classes (messages.md).

Import the modules by name, so that it stays visible who speaks::

    from gradient_protocol.messages import common, server, shapes, worker
"""
