//! The REST API: repositories, branches, pull requests, and tokens for apps.

use std::time::{Duration, UNIX_EPOCH};

use http::StatusCode;
use http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};

use super::hub::{Hub, Repository, State};
use super::pull::{Place, Pull};
use super::reply::Reply;
use super::route::{Rest, field};

/// A pull request that is asked for.
#[derive(Deserialize)]
struct Create {
    title: String,
    head: String,
    base: String,
    body: Option<String>,
    #[serde(default)]
    draft: bool,
}

/// What is to change in one.
#[derive(Deserialize)]
struct Update {
    title: Option<String>,
    body: Option<String>,
    state: Option<String>,
}

/// What an app's token is to be good for.
#[derive(Default, Deserialize)]
struct Scope {
    repositories: Option<Vec<String>>,
    permissions: Option<Value>,
}

pub(super) fn answer(hub: &Hub, ask: &Rest, head: &Parts, body: &[u8]) -> Reply {
    let mut state = hub.state();
    let name = match ask {
        Rest::AccessToken { installation } => return token(&mut state, head, *installation, body),
        Rest::Graph => return withdraw(&mut state, head, body),
        Rest::Installation { name } => return installation(&state, head, name),
        Rest::RepositoryById { id } => {
            let found = state.repositories.iter().find(|(_, found)| found.id == *id);
            let Some((name, _)) = found else { return Reply::not_found() };
            name.clone()
        }
        Rest::Repository { name }
        | Rest::Branch { name, .. }
        | Rest::ListPulls { name }
        | Rest::CreatePull { name }
        | Rest::GetPull { name, .. }
        | Rest::UpdatePull { name, .. } => name.clone(),
    };
    if !state.access.knows(head) {
        return Reply::bad_credentials();
    }
    if let Some(id) = state.moved.get(&name) {
        return moved(hub.url(), *id, head);
    }
    if !state.access.admits(head, &name) {
        return Reply::not_found();
    }
    let Some(repository) = state.repositories.get_mut(&name) else { return Reply::not_found() };
    let place = Shown { url: hub.url(), name: &name };
    match ask {
        Rest::Branch { branch, .. } => show_branch(repository, branch),
        Rest::ListPulls { .. } => place.list(repository, head),
        Rest::CreatePull { .. } => match serde_json::from_slice(body) {
            Ok(create) => place.create(repository, create),
            Err(_) => Reply::error(StatusCode::BAD_REQUEST, "Problems parsing JSON"),
        },
        Rest::GetPull { number, .. } => match find(repository, *number) {
            Some(pull) => Reply::ok(&place.pull(repository, pull)),
            None => Reply::not_found(),
        },
        Rest::UpdatePull { number, .. } => match serde_json::from_slice(body) {
            Ok(update) => place.update(repository, *number, update),
            Err(_) => Reply::error(StatusCode::BAD_REQUEST, "Problems parsing JSON"),
        },
        _ => place.repository(repository),
    }
}

/// A repository with the address it is shown at.
struct Shown<'a> {
    url: &'a str,
    name: &'a str,
}

impl Shown<'_> {
    fn repository(&self, repository: &Repository) -> Reply {
        let Self { url, name } = self;
        Reply::ok(&json!({
            "id": repository.id,
            "full_name": name,
            "html_url": format!("{url}/{name}"),
            "clone_url": format!("{url}/{name}.git"),
            "default_branch": repository.default_branch(),
            "archived": false,
        }))
    }

    fn pull(&self, repository: &Repository, pull: &Pull) -> Value {
        pull.shown(&Place {
            url: self.url,
            repository: self.name,
            id: repository.id,
            head: &repository.branch(&pull.head).unwrap_or_default(),
            base: &repository.branch(&pull.base).unwrap_or_default(),
        })
    }

    fn list(&self, repository: &Repository, head: &Parts) -> Reply {
        let state = field(head, "state").unwrap_or_else(|| "open".to_owned());
        let owner = self.name.split('/').next().unwrap_or_default();
        let (from, to) = (field(head, "head"), field(head, "base"));
        let is_asked_for = |pull: &&Pull| {
            (state == "all" || pull.is_open == (state == "open"))
                && from.as_ref().is_none_or(|from| *from == format!("{owner}:{}", pull.head))
                && to.as_ref().is_none_or(|to| *to == pull.base)
        };
        let found = repository.pulls.iter().rev().filter(is_asked_for);
        Reply::ok(&found.map(|pull| self.pull(repository, pull)).collect())
    }

    fn create(&self, repository: &mut Repository, create: Create) -> Reply {
        let Create { title, head, base, body, draft } = create;
        let owner = self.name.split('/').next().unwrap_or_default();
        let head = head.strip_prefix(&format!("{owner}:")).unwrap_or(&head).to_owned();
        let Some(tip) = repository.branch(&head) else {
            return Reply::invalid("PullRequest", "head");
        };
        let Some(floor) = repository.branch(&base) else {
            return Reply::invalid("PullRequest", "base");
        };
        if tip == floor {
            let message = format!("No commits between {base} and {head}");
            return Reply::refused("PullRequest", &message);
        }
        let is_same = |pull: &Pull| {
            pull.is_open && pull.fork.is_none() && pull.head == head && pull.base == base
        };
        if repository.pulls.iter().any(is_same) {
            let message = format!("A pull request already exists for {owner}:{head}.");
            return Reply::refused("PullRequest", &message);
        }
        let number = repository.pulls.len() as u64 + 1;
        let pull =
            Pull { number, title, body, head, base, is_draft: draft, is_open: true, fork: None };
        let shown = self.pull(repository, &pull);
        repository.pulls.push(pull);
        Reply::json(StatusCode::CREATED, &shown)
            .with("location", format!("{}/repos/{}/pulls/{number}", self.url, self.name))
    }

    fn update(&self, repository: &mut Repository, number: u64, update: Update) -> Reply {
        let pull = repository.pulls.iter_mut().find(|pull| pull.number == number);
        let Some(pull) = pull else { return Reply::not_found() };
        pull.title = update.title.unwrap_or_else(|| pull.title.clone());
        pull.body = update.body.or_else(|| pull.body.take());
        pull.is_open = update.state.map_or(pull.is_open, |state| state == "open");
        let pull = pull.clone();
        Reply::ok(&self.pull(repository, &pull))
    }
}

/// The one mutation that there is: it makes a pull request a draft.
fn withdraw(state: &mut State, head: &Parts, body: &[u8]) -> Reply {
    if !state.access.knows(head) {
        return Reply::bad_credentials();
    }
    let asked: Value = serde_json::from_slice(body).unwrap_or_default();
    let is_known =
        asked["query"].as_str().is_some_and(|it| it.contains("convertPullRequestToDraft"));
    let mut all = state.repositories.values_mut().flat_map(|repository| {
        let id = repository.id;
        repository.pulls.iter_mut().map(move |pull| (pull.node(id), pull))
    });
    match all.find(|(node, _)| is_known && asked["variables"]["id"] == node.as_str()) {
        Some((_, pull)) => {
            pull.is_draft = true;
            let pull = json!({ "pullRequest": { "isDraft": true } });
            Reply::ok(&json!({ "data": { "convertPullRequestToDraft": pull } }))
        }
        None => Reply::graph_error("NOT_FOUND", "Could not resolve to a node"),
    }
}

fn find(repository: &Repository, number: u64) -> Option<&Pull> {
    repository.pulls.iter().find(|pull| pull.number == number)
}

fn show_branch(repository: &Repository, branch: &str) -> Reply {
    let Some(sha) = repository.branch(branch) else {
        return Reply::error(StatusCode::NOT_FOUND, "Branch not found");
    };
    let is_protected = repository.protected.iter().any(|one| one == branch);
    Reply::ok(&json!({ "name": branch, "commit": { "sha": sha }, "protected": is_protected }))
}

fn moved(url: &str, id: u64, head: &Parts) -> Reply {
    // What stands below the repository's name stands below its id.
    let rest = head.uri.path().splitn(5, '/').nth(4);
    let rest = rest.map_or_else(String::new, |rest| format!("/{rest}"));
    let location = format!("{url}/repositories/{id}{rest}");
    let status = StatusCode::MOVED_PERMANENTLY;
    let body = json!({
        "message": "Moved Permanently",
        "url": location,
        "documentation_url": "https://docs.github.com/rest/guides/best-practices-for-using-the-rest-api#follow-redirects",
    });
    Reply::json(status, &body).with("location", location)
}

fn installation(state: &State, head: &Parts, name: &str) -> Reply {
    let Some(app) = state.access.app(head) else { return bad_signature() };
    if !app.names.iter().any(|one| one == name) {
        return Reply::not_found();
    }
    Reply::ok(&json!({ "id": app.installation, "app_id": 1, "target_type": "Organization" }))
}

fn token(state: &mut State, head: &Parts, installation: u64, body: &[u8]) -> Reply {
    let Some(app) = state.access.app(head).cloned() else { return bad_signature() };
    if app.installation != installation {
        return Reply::not_found();
    }
    let scope: Scope = serde_json::from_slice(body).unwrap_or_default();
    let names = match &scope.repositories {
        None => app.names,
        Some(asked) => {
            let is_asked_for =
                |name: &&String| asked.iter().any(|one| name.ends_with(&format!("/{one}")));
            app.names.iter().filter(is_asked_for).cloned().collect()
        }
    };
    if names.is_empty() {
        return Reply::error(
            StatusCode::UNPROCESSABLE_ENTITY,
            "There is at least one repository that does not exist or is not accessible to the parent installation.",
        );
    }
    let (token, expires) = state.access.issue(names);
    let expires = UNIX_EPOCH + Duration::from_secs(expires);
    Reply::json(
        StatusCode::CREATED,
        &json!({
            "token": token,
            "expires_at": humantime::format_rfc3339_seconds(expires).to_string(),
            "permissions": scope.permissions,
            "repository_selection": "selected",
        }),
    )
}

fn bad_signature() -> Reply {
    Reply::error(StatusCode::UNAUTHORIZED, "A JSON web token could not be decoded")
}
