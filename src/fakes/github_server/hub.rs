//! The state of the fake server. Its connections and the test share it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use hex::FromHex;
use http::request::Parts;
use serde_json::Value;

use super::access::FakeAccess;
use super::fault::{FaultRule, InjectedFailure};
use super::pull_request::FakePullRequest;
use super::route::{FakeGithubRoute, GithubOperation};
use crate::base::response_gate::ResponseGate;

/// A handle to the state. Clones refer to the same server.
#[derive(Clone, Debug)]
pub struct FakeGithubHandle {
    url: Arc<str>,
    gate: ResponseGate,
    state: Arc<Mutex<FakeGithubState>>,
}

/// A received request, without its token.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedCall {
    pub operation: GithubOperation,
    pub path: String,
    /// `Null` if the body was not JSON.
    pub body: Value,
    pub agent: String,
}

#[derive(Debug, Default)]
pub(super) struct FakeGithubState {
    pub(super) repositories: BTreeMap<String, FakeRepository>,
    /// The old names of renamed repositories, with the repositories' ids.
    pub(super) moved: BTreeMap<String, u64>,
    pub(super) access: FakeAccess,
    faults: Vec<FaultRule>,
    calls: Vec<RecordedCall>,
}

#[derive(Debug)]
pub(super) struct FakeRepository {
    pub(super) id: u64,
    /// The path of a bare repository on this disk.
    pub(super) path: PathBuf,
    pub(super) protected: Vec<String>,
    pub(super) pulls: Vec<FakePullRequest>,
}

impl FakeGithubHandle {
    pub(super) fn new(url: String) -> Self {
        Self { url: url.into(), gate: ResponseGate::default(), state: Arc::default() }
    }

    /// Returns the URL of the API. The repositories are at `URL/owner/name.git`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the gate at which requests with a `Hold` fault wait.
    pub fn response_gate(&self) -> &ResponseGate {
        &self.gate
    }

    /// Serves a bare repository of this disk as `owner/name`.
    pub fn add_repository(&self, name: &str, path: &Path) {
        let mut state = self.lock_state();
        // Ids of repositories begin at 100, so that no test confuses them with another kind of id.
        let id = 100 + state.repositories.len() as u64;
        let path = path.to_path_buf();
        let repository = FakeRepository { id, path, protected: vec![], pulls: vec![] };
        state.repositories.insert(name.to_owned(), repository);
    }

    /// Renames a repository. The old name redirects to the new one, as on GitHub.
    pub fn rename_repository(&self, old: &str, new: &str) {
        let mut state = self.lock_state();
        if let Some(repository) = state.repositories.remove(old) {
            // The redirect names the id, so that a second rename leaves it valid.
            state.moved.insert(old.to_owned(), repository.id);
            state.repositories.insert(new.to_owned(), repository);
        }
    }

    /// Marks a branch as protected.
    pub fn protect_branch(&self, name: &str, branch: &str) {
        if let Some(repository) = self.lock_state().repositories.get_mut(name) {
            repository.protected.push(branch.to_owned());
        }
    }

    /// Accepts a token for all repositories.
    pub fn accept_token(&self, token: &str) {
        self.lock_state().access.accept_token(token);
    }

    /// Accepts an app with this id and public key (PKCS#1, DER), installed for some repositories.
    pub fn install_app(&self, app: &str, public_key: &[u8], names: &[&str]) {
        self.lock_state().access.install_app(app, public_key, names);
    }

    /// Revokes every token that was issued to an app.
    pub fn revoke_tokens(&self) {
        self.lock_state().access.revoke_all();
    }

    /// Sets the lifetime of tokens that are issued to apps from now on.
    pub fn set_token_lifetime(&self, seconds: u64) {
        self.lock_state().access.lifetime = seconds;
    }

    /// Injects a failure into later requests. Failures of one operation happen in the order in which they were
    /// injected.
    pub fn inject(&self, operation: GithubOperation, failure: InjectedFailure, times: u32) {
        self.lock_state().faults.push(FaultRule { operation, failure, times });
    }

    /// Returns the pull requests of a repository.
    pub fn pulls(&self, name: &str) -> Vec<FakePullRequest> {
        self.lock_state()
            .repositories
            .get(name)
            .map(|found| found.pulls.clone())
            .unwrap_or_default()
    }

    /// Adds a pull request.
    pub fn add_pull(&self, name: &str, pull: FakePullRequest) {
        if let Some(repository) = self.lock_state().repositories.get_mut(name) {
            repository.pulls.push(pull);
        }
    }

    /// Changes a pull request as a person would on the web page.
    pub fn edit_pull(&self, name: &str, number: u64, change: impl FnOnce(&mut FakePullRequest)) {
        let mut state = self.lock_state();
        let pulls = state.repositories.get_mut(name).map(|found| &mut found.pulls);
        if let Some(pull) = pulls.and_then(|all| all.iter_mut().find(|pull| pull.number == number))
        {
            change(pull);
        }
    }

    /// Returns the received requests, in order.
    pub fn recorded_calls(&self) -> Vec<RecordedCall> {
        self.lock_state().calls.clone()
    }

    /// Returns the number of requests for an operation.
    pub fn count_calls(&self, operation: GithubOperation) -> usize {
        self.lock_state().calls.iter().filter(|call| call.operation == operation).count()
    }

    pub(super) fn lock_state(&self) -> MutexGuard<'_, FakeGithubState> {
        // A failed test may poison the lock; the other tests of the process still read the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn record_call(&self, route: &FakeGithubRoute, head: &Parts, body: &Bytes) {
        let agent = head.headers.get("user-agent").and_then(|agent| agent.to_str().ok());
        let call = RecordedCall {
            operation: route.operation(),
            path: head.uri.to_string(),
            body: serde_json::from_slice(body).unwrap_or_default(),
            agent: agent.unwrap_or_default().to_owned(),
        };
        self.lock_state().calls.push(call);
    }

    pub(super) fn take_fault(&self, operation: GithubOperation) -> Option<InjectedFailure> {
        let mut state = self.lock_state();
        let fault = state
            .faults
            .iter_mut()
            .find(|fault| fault.operation == operation && fault.times > 0)?;
        // A used-up fault stays in the list and is skipped from now on.
        fault.times -= 1;
        Some(fault.failure.clone())
    }
}

impl FakeRepository {
    /// Returns the commit of a branch, read from the repository's files.
    pub(super) fn branch_tip(&self, name: &str) -> Option<String> {
        let reference = format!("refs/heads/{name}");
        // Git stores a branch in its own file, or after `git pack-refs` as a line of `packed-refs`.
        let loose = fs::read_to_string(self.path.join(&reference)).ok();
        let packed = || fs::read_to_string(self.path.join("packed-refs")).ok();
        let sha = loose.map(|text| text.trim().to_owned()).or_else(|| {
            let packed = packed()?;
            let line = packed.lines().find_map(|line| line.strip_suffix(&reference))?;
            line.strip_suffix(' ').map(str::to_owned)
        })?;
        // A symbolic or damaged reference is not a commit.
        <[u8; 20]>::from_hex(&sha).is_ok().then_some(sha)
    }

    /// Returns the branch that `HEAD` names.
    pub(super) fn default_branch(&self) -> String {
        let head = fs::read_to_string(self.path.join("HEAD")).unwrap_or_default();
        head.trim().strip_prefix("ref: refs/heads/").unwrap_or("main").to_owned()
    }
}
