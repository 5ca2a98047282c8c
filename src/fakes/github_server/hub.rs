//! What the stand-in knows, shared by its connections and by whoever tells it what to know.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::request::Parts;
use serde_json::Value;

use super::access::FakeAccess;
use super::fault::{FaultRule, InjectedFailure};
use super::pull_request::FakePullRequest;
use super::route::{FakeGithubRoute, GithubOperation};
use crate::base::hex;
use crate::base::response_gate::ResponseGate;

/// A handle. Clones are the same stand-in.
#[derive(Clone, Debug)]
pub struct FakeGithubHandle {
    url: Arc<str>,
    gate: ResponseGate,
    state: Arc<Mutex<FakeGithubState>>,
}

/// A request that came, with what stood in it but for its token.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedCall {
    pub operation: GithubOperation,
    pub path: String,
    /// `Null` where it was none.
    pub body: Value,
    pub agent: String,
}

#[derive(Debug, Default)]
pub(super) struct FakeGithubState {
    pub(super) repositories: BTreeMap<String, FakeRepository>,
    /// From an old name to the id.
    pub(super) moved: BTreeMap<String, u64>,
    pub(super) access: FakeAccess,
    faults: Vec<FaultRule>,
    calls: Vec<RecordedCall>,
}

#[derive(Debug)]
pub(super) struct FakeRepository {
    pub(super) id: u64,
    /// A bare repository on this disk.
    pub(super) path: PathBuf,
    pub(super) protected: Vec<String>,
    pub(super) pulls: Vec<FakePullRequest>,
}

impl FakeGithubHandle {
    pub(super) fn new(url: String) -> Self {
        Self { url: url.into(), gate: ResponseGate::default(), state: Arc::default() }
    }

    /// Where its API is. Its repositories are at `URL/owner/name.git`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Where requests wait that were told to.
    pub fn response_gate(&self) -> &ResponseGate {
        &self.gate
    }

    /// Serves a bare repository of this disk as `owner/name`.
    pub fn add_repository(&self, name: &str, path: &Path) {
        let mut state = self.lock_state();
        let id = 100 + state.repositories.len() as u64;
        let path = path.to_path_buf();
        let repository = FakeRepository { id, path, protected: vec![], pulls: vec![] };
        state.repositories.insert(name.to_owned(), repository);
    }

    /// Gives a repository another name. The old one leads to it, as GitHub does.
    pub fn rename_repository(&self, old: &str, new: &str) {
        let mut state = self.lock_state();
        if let Some(repository) = state.repositories.remove(old) {
            state.moved.insert(old.to_owned(), repository.id);
            state.repositories.insert(new.to_owned(), repository);
        }
    }

    /// Protects a branch: nobody may push there.
    pub fn protect_branch(&self, name: &str, branch: &str) {
        if let Some(repository) = self.lock_state().repositories.get_mut(name) {
            repository.protected.push(branch.to_owned());
        }
    }

    /// Accepts a token for everything.
    pub fn accept_token(&self, token: &str) {
        self.lock_state().access.accept_token(token);
    }

    /// Accepts an app by its id and its public key (PKCS#1, DER), installed for some repositories.
    pub fn install_app(&self, app: &str, public_key: &[u8], names: &[&str]) {
        self.lock_state().access.install_app(app, public_key, names);
    }

    /// Takes back every token that it gave an app.
    pub fn revoke_tokens(&self) {
        self.lock_state().access.revoke_all();
    }

    /// From now on a token of an app is good for so many seconds.
    pub fn set_token_lifetime(&self, seconds: u64) {
        self.lock_state().access.lifetime = seconds;
    }

    /// Lets requests fail that come from now on. Faults of one kind are met in the order they were given.
    pub fn inject(&self, operation: GithubOperation, trouble: InjectedFailure, times: u32) {
        self.lock_state().faults.push(FaultRule { operation, trouble, times });
    }

    /// The pull requests of a repository.
    pub fn pulls(&self, name: &str) -> Vec<FakePullRequest> {
        self.lock_state()
            .repositories
            .get(name)
            .map(|found| found.pulls.clone())
            .unwrap_or_default()
    }

    /// Changes a pull request as a person would on the page.
    pub fn edit_pull(&self, name: &str, number: u64, change: impl FnOnce(&mut FakePullRequest)) {
        let mut state = self.lock_state();
        let pulls = state.repositories.get_mut(name).map(|found| &mut found.pulls);
        if let Some(pull) = pulls.and_then(|all| all.iter_mut().find(|pull| pull.number == number))
        {
            change(pull);
        }
    }

    /// What was asked so far, in order.
    pub fn recorded_calls(&self) -> Vec<RecordedCall> {
        self.lock_state().calls.clone()
    }

    /// How often one thing was asked.
    pub fn count_calls(&self, operation: GithubOperation) -> usize {
        self.lock_state().calls.iter().filter(|call| call.operation == operation).count()
    }

    pub(super) fn lock_state(&self) -> MutexGuard<'_, FakeGithubState> {
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
        fault.times -= 1;
        Some(fault.trouble.clone())
    }
}

impl FakeRepository {
    /// What a branch points to, as git has it on the disk.
    pub(super) fn branch_tip(&self, name: &str) -> Option<String> {
        let reference = format!("refs/heads/{name}");
        let loose = fs::read_to_string(self.path.join(&reference)).ok();
        let packed = || fs::read_to_string(self.path.join("packed-refs")).ok();
        let sha = loose.map(|text| text.trim().to_owned()).or_else(|| {
            let packed = packed()?;
            let line = packed.lines().find_map(|line| line.strip_suffix(&reference))?;
            line.strip_suffix(' ').map(str::to_owned)
        })?;
        hex::decode_hex::<20>(&sha).map(|_| sha)
    }

    /// The branch that `HEAD` names.
    pub(super) fn default_branch(&self) -> String {
        let head = fs::read_to_string(self.path.join("HEAD")).unwrap_or_default();
        head.trim().strip_prefix("ref: refs/heads/").unwrap_or("main").to_owned()
    }
}
