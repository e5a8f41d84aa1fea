"""``fedlight device measure``: a trial of this machine, and the profile of a device that it gives."""
