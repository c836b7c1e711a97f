"""Which backend runs a call: the registry of backends, the policy that orders them, and the check of the unmeasured."""
