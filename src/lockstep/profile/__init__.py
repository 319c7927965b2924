"""Where the time of a step goes: one trace of all ranks, and what it says in words."""

from lockstep.profile.run import Profile, profile_steps

__all__ = ["Profile", "profile_steps"]
