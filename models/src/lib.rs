//! MoH and MoA checkpoints, routers and model families
