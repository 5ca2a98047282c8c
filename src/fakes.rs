//! Stand-ins for what runs call, as real servers on sockets: `demo`, `fake-provider` and the tests use them.

pub mod github_server;
pub mod model_provider;
