//! What the stand-in knows, shared by its connections and by whoever tells it what to know.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::request::Parts;
use serde_json::Value;

use super::access::Access;
use super::fault::{Fault, Trouble};
use super::pull::Pull;
use super::route::{Operation, Route};
use crate::base::gate::Gate;
use crate::base::hex;

/// A handle. Clones are the same stand-in.
#[derive(Clone, Debug)]
pub struct Hub {
    url: Arc<str>,
    gate: Gate,
    state: Arc<Mutex<State>>,
}

/// A request that came, with what stood in it but for its token.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub operation: Operation,
    pub path: String,
    /// `Null` where it was none.
    pub body: Value,
    pub agent: String,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) repositories: BTreeMap<String, Repository>,
    /// From an old name to the id.
    pub(super) moved: BTreeMap<String, u64>,
    pub(super) access: Access,
    faults: Vec<Fault>,
    calls: Vec<Call>,
}

#[derive(Debug)]
pub(super) struct Repository {
    pub(super) id: u64,
    /// A bare repository on this disk.
    pub(super) path: PathBuf,
    pub(super) protected: Vec<String>,
    pub(super) pulls: Vec<Pull>,
}

impl Hub {
    pub(super) fn new(url: String) -> Self {
        Self { url: url.into(), gate: Gate::default(), state: Arc::default() }
    }

    /// Where its API is. Its repositories are at `URL/owner/name.git`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Where requests wait that were told to.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Serves a bare repository of this disk as `owner/name`.
    pub fn add(&self, name: &str, path: &Path) {
        let mut state = self.state();
        let id = 100 + state.repositories.len() as u64;
        let path = path.to_path_buf();
        let repository = Repository { id, path, protected: vec![], pulls: vec![] };
        state.repositories.insert(name.to_owned(), repository);
    }

    /// Gives a repository another name. The old one leads to it, as GitHub does.
    pub fn rename(&self, old: &str, new: &str) {
        let mut state = self.state();
        if let Some(repository) = state.repositories.remove(old) {
            state.moved.insert(old.to_owned(), repository.id);
            state.repositories.insert(new.to_owned(), repository);
        }
    }

    /// Protects a branch: nobody may push there.
    pub fn protect(&self, name: &str, branch: &str) {
        if let Some(repository) = self.state().repositories.get_mut(name) {
            repository.protected.push(branch.to_owned());
        }
    }

    /// Accepts a token for everything.
    pub fn accept(&self, token: &str) {
        self.state().access.accept(token);
    }

    /// Accepts an app by its id and its public key (PKCS#1, DER), installed for some repositories.
    pub fn install(&self, app: &str, public_key: &[u8], names: &[&str]) {
        self.state().access.install(app, public_key, names);
    }

    /// Takes back every token that it gave an app.
    pub fn revoke_tokens(&self) {
        self.state().access.revoke();
    }

    /// From now on a token of an app is good for so many seconds.
    pub fn set_token_lifetime(&self, seconds: u64) {
        self.state().access.lifetime = seconds;
    }

    /// Lets requests fail that come from now on. Faults of one kind are met in the order they were given.
    pub fn inject(&self, operation: Operation, trouble: Trouble, times: u32) {
        self.state().faults.push(Fault { operation, trouble, times });
    }

    /// The pull requests of a repository.
    pub fn pulls(&self, name: &str) -> Vec<Pull> {
        self.state().repositories.get(name).map(|found| found.pulls.clone()).unwrap_or_default()
    }

    /// Changes a pull request as a person would on the page.
    pub fn edit(&self, name: &str, number: u64, change: impl FnOnce(&mut Pull)) {
        let mut state = self.state();
        let pulls = state.repositories.get_mut(name).map(|found| &mut found.pulls);
        if let Some(pull) = pulls.and_then(|all| all.iter_mut().find(|pull| pull.number == number))
        {
            change(pull);
        }
    }

    /// What was asked so far, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// How often one thing was asked.
    pub fn count(&self, operation: Operation) -> usize {
        self.state().calls.iter().filter(|call| call.operation == operation).count()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn called(&self, route: &Route, head: &Parts, body: &Bytes) {
        let agent = head.headers.get("user-agent").and_then(|agent| agent.to_str().ok());
        let call = Call {
            operation: route.operation(),
            path: head.uri.to_string(),
            body: serde_json::from_slice(body).unwrap_or_default(),
            agent: agent.unwrap_or_default().to_owned(),
        };
        self.state().calls.push(call);
    }

    pub(super) fn fault(&self, operation: Operation) -> Option<Trouble> {
        let mut state = self.state();
        let fault = state
            .faults
            .iter_mut()
            .find(|fault| fault.operation == operation && fault.times > 0)?;
        fault.times -= 1;
        Some(fault.trouble.clone())
    }
}

impl Repository {
    /// What a branch points to, as git has it on the disk.
    pub(super) fn branch(&self, name: &str) -> Option<String> {
        let reference = format!("refs/heads/{name}");
        let loose = fs::read_to_string(self.path.join(&reference)).ok();
        let packed = || fs::read_to_string(self.path.join("packed-refs")).ok();
        let sha = loose.map(|text| text.trim().to_owned()).or_else(|| {
            let packed = packed()?;
            let line = packed.lines().find_map(|line| line.strip_suffix(&reference))?;
            line.strip_suffix(' ').map(str::to_owned)
        })?;
        hex::decode::<20>(&sha).map(|_| sha)
    }

    /// The branch that `HEAD` names.
    pub(super) fn default_branch(&self) -> String {
        let head = fs::read_to_string(self.path.join("HEAD")).unwrap_or_default();
        head.trim().strip_prefix("ref: refs/heads/").unwrap_or("main").to_owned()
    }
}
