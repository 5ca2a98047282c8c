//! One pull request for each branch, created or brought up to date.
//!
//! Whatever goes wrong, the way on begins with looking: which pull request is there now? So an answer that was lost, a
//! request that came twice or a crash cannot make a second one.
//!
//! **Invariant:** what people wrote into a pull request stays as it is, byte for byte; the relay changes only what
//! stands between its own marks ([`island`]).
//!
//! **Invariant:** an agent's words name nobody, close nothing and load nothing ([`text`]).

pub mod island;
pub mod text;

use http::Method;
use serde::{Deserialize, Serialize};

use super::credential::Credential;
use super::github::{Api, Error, encoded, path};
use crate::base::secret::Secret;
use crate::relay::repository::Hosted;
use crate::relay::{Branch, Sha};

/// What is to stand on a pull request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The branch with the work.
    pub head: Branch,
    /// The branch it is meant for; the repository's default branch where none is named.
    pub base: Option<String>,
    pub run: String,
    pub agent: String,
    /// Of a new pull request; an old one keeps what it has. The agent's words.
    pub title: String,
    /// The agent's words, too.
    pub body: String,
    /// From where to where the run has moved the branch.
    pub moved: (Sha, Sha),
    /// Whether somebody has to look at it before it counts: a new one is then a draft.
    pub needs_review: bool,
}

/// A pull request that says what it should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub number: u64,
    pub url: String,
    pub is_new: bool,
}

/// What is read of a pull request.
#[derive(Debug, Deserialize)]
struct Found {
    number: u64,
    html_url: String,
    body: Option<String>,
    head: Side,
    base: Side,
}

#[derive(Debug, Deserialize)]
struct Side {
    #[serde(rename = "ref")]
    branch: String,
}

#[derive(Serialize)]
struct Create<'a> {
    title: &'a str,
    head: String,
    base: &'a str,
    body: &'a str,
    draft: bool,
}

#[derive(Serialize)]
struct Update<'a> {
    body: &'a str,
}

/// Brings the branch's pull request up to date, or makes one.
///
/// # Errors
/// What cannot be helped by trying again for some seconds. [`Error::later`] says whether it can be by waiting.
pub async fn publish(
    api: &Api,
    credential: &Credential,
    repository: &Hosted,
    order: &Order,
) -> Result<Published, Error> {
    let attempt = |token| async move { Desk { api, token, repository, order }.publish().await };
    let attempts = || credential.with(api, repository, attempt);
    Box::pin(api.patience().keep(attempts)).await
}

/// Where one attempt is made.
struct Desk<'a> {
    api: &'a Api,
    token: Secret,
    repository: &'a Hosted,
    order: &'a Order,
}

impl Desk<'_> {
    async fn publish(&self) -> Result<Published, Error> {
        let base = match &self.order.base {
            Some(base) => base.clone(),
            None => self.api.about(&self.token, self.repository).await?.default_branch,
        };
        if let Some(found) = self.find(&base).await? {
            return self.update(found).await;
        }
        match self.create(&base, self.order.needs_review).await {
            // Somebody was faster, or we were and never heard of it.
            Err(error) if error.has(|reason| reason.message.contains(EXISTS)) => {
                let found = self.find(&base).await?;
                self.update(found.ok_or(Error::Unanswered(error.to_string()))?).await
            }
            // Not every plan has drafts. The text says that it is to be looked at.
            Err(error) if self.order.needs_review && error.to_string().contains(NO_DRAFTS) => {
                self.create(&base, false).await
            }
            created => created,
        }
    }

    /// The open pull request from the branch to `base`. GitHub is asked for just that, and not believed: what it does
    /// not understand in a query, it leaves out.
    async fn find(&self, base: &str) -> Result<Option<Found>, Error> {
        let head = self.order.head.to_string();
        let query = format!(
            "/pulls?state=open&head={}%3A{}&base={}&per_page=20",
            self.repository.owner(),
            encoded(&head),
            encoded(base)
        );
        let found: Vec<Found> = self.api.get(&self.token, &path(self.repository, &query)).await?;
        Ok(found.into_iter().find(|one| one.head.branch == head && one.base.branch == base))
    }

    async fn create(&self, base: &str, draft: bool) -> Result<Published, Error> {
        let title = text::title(&self.order.title, &format!("Changes from {}", self.order.head));
        let body = island::put(None, &self.order.run, &self.words()).unwrap_or_default();
        let head = self.order.head.to_string();
        let create = Create { title: &title, head, base, body: &body, draft };
        let address = path(self.repository, "/pulls");
        let created: Found =
            self.api.call(&self.token, Method::POST, &address, Some(&create)).await?;
        Ok(Published { number: created.number, url: created.html_url, is_new: true })
    }

    async fn update(&self, found: Found) -> Result<Published, Error> {
        let old = found.body.as_deref();
        let published = Published { number: found.number, url: found.html_url, is_new: false };
        let Some(body) = island::put(old, &self.order.run, &self.words()) else {
            tracing::warn!(
                url = published.url,
                "the pull request's text is full; it stays as it is"
            );
            return Ok(published);
        };
        if old == Some(body.as_str()) {
            return Ok(published);
        }
        let address = path(self.repository, &format!("/pulls/{}", found.number));
        let update = Update { body: &body };
        let _: Found = self.api.call(&self.token, Method::PATCH, &address, Some(&update)).await?;
        Ok(published)
    }

    /// What the run has to say: the agent's words, and ours below them.
    fn words(&self) -> String {
        let Order { run, agent, moved: (from, to), .. } = self.order;
        let body = text::body(&self.order.body);
        let run = text::code(run);
        let agent =
            if agent.is_empty() { String::new() } else { format!(" of {}", text::code(agent)) };
        let from = if *from == Sha::NONE { "nothing".to_owned() } else { format!("`{from}`") };
        let review = if self.order.needs_review { REVIEW } else { "" };
        let gap = if body.is_empty() { "" } else { "\n\n" };
        format!("{body}{gap}Run {run}{agent} moved the branch from {from} to `{to}`.{review}")
    }
}

const EXISTS: &str = "A pull request already exists";
const NO_DRAFTS: &str = "Draft pull requests are not supported";
const REVIEW: &str = " **Its changes touch what is protected: they need a review.**";
