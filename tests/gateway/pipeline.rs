//! Tests of the pipeline, from the client's socket to the upstream's socket.

mod admission_record;
mod allocations;
mod budget;
mod call_cost;
mod client_disconnect;
mod client_limits;
mod cost_budget;
mod fields;
mod headers;
mod load_limits;
mod output_limiter;
mod panic;
mod routes;
pub(crate) mod smuggling;
mod stream;
