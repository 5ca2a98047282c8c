//! Tests of the GitHub stand-in, and of the relay's calls to it.

mod client;
mod credential;
mod git_access;
mod pull_request;
mod pull_request_text;
