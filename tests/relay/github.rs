//! The stand-in for GitHub, and the relay's calls to it.

mod client;
mod credential;
mod git_access;
mod pull_request;
mod pull_request_text;
