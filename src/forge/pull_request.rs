//! One pull request for each branch, created or brought up to date.
//!
//! Whatever goes wrong, the way on begins with looking: which pull request is there now? So an answer that was lost, a
//! request that came twice or a crash cannot make a second one.
//!
//! **Invariant:** what people wrote into a pull request stays as it is, byte for byte; the relay changes only what
//! stands between its own marks ([`island`]).
//!
//! **Invariant:** work that needs a review never comes to a pull request that is ready to be merged.
//!
//! **Invariant:** an agent's words name nobody, close nothing and load nothing ([`text`]).

pub mod island;
pub mod text;

use http::Method;
use serde::{Deserialize, Serialize};

use super::credential::Credential;
use super::github::{Api, Error, encoded, path};
use crate::base::secret::Secret;
use crate::relay::judge::Reason;
use crate::relay::repository::Hosted;
use crate::relay::{Branch, Sha};
use island::NOTICE;

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
    /// Why.
    pub reasons: Vec<Reason>,
    /// Why somebody has to look at what the branch had before. A pull request that does not say so yet is then a draft, too.
    pub before: Vec<Reason>,
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
    /// Its name in the API that is not REST. Not every forge that speaks the one has the other.
    #[serde(default)]
    node_id: String,
    html_url: String,
    #[serde(default)]
    draft: bool,
    body: Option<String>,
    head: Side,
    base: Side,
}

#[derive(Debug, Deserialize)]
struct Side {
    #[serde(rename = "ref")]
    branch: String,
    /// `None` where the repository is gone: it was a fork.
    repo: Option<Home>,
}

#[derive(Debug, Deserialize)]
struct Home {
    full_name: String,
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

/// Takes the pull requests of a branch back to drafts, before work is pushed there that needs a review: one that is ready
/// may be merged by itself as soon as the work is there.
///
/// # Errors
/// As [`publish`]. Nothing is to be pushed then.
pub async fn withdraw(
    api: &Api,
    credential: &Credential,
    repository: &Hosted,
    branch: &Branch,
) -> Result<(), Error> {
    let attempt =
        |token: Secret| async move { withdraw_all(api, &token, repository, branch).await };
    let attempts = || credential.with(api, repository, attempt);
    Box::pin(api.patience().keep(attempts)).await
}

async fn withdraw_all(
    api: &Api,
    token: &Secret,
    repository: &Hosted,
    branch: &Branch,
) -> Result<(), Error> {
    for found in open(api, token, (repository, branch), "").await? {
        make_draft(api, token, &found).await?;
    }
    Ok(())
}

/// Makes a pull request a draft, where it is none yet.
async fn make_draft(api: &Api, token: &Secret, found: &Found) -> Result<(), Error> {
    if found.draft {
        return Ok(());
    }
    match api.mutate(token, TO_DRAFT, &found.node_id).await {
        // Where there are no drafts, nothing is merged by itself either. The text says that it is to be looked at.
        Err(error) if error.to_string().contains(NO_DRAFTS) => return Ok(()),
        done => done?,
    }
    tracing::info!(url = found.html_url, "the pull request is a draft again");
    Ok(())
}

/// The open pull requests from a branch, which `more` of a query is about. GitHub is asked for just those, and not
/// believed: what it does not understand in a query, it leaves out, and a fork's branch may have the same name.
async fn open(
    api: &Api,
    token: &Secret,
    (repository, branch): (&Hosted, &Branch),
    more: &str,
) -> Result<Vec<Found>, Error> {
    let (owner, branch) = (repository.owner(), branch.to_string());
    let query = format!("/pulls?state=open&head={owner}%3A{}{more}&per_page=20", encoded(&branch));
    let found: Vec<Found> = api.get(token, &path(repository, &query)).await?;
    let own = format!("{owner}/{}", repository.name());
    let is_own = |home: &Home| home.full_name.eq_ignore_ascii_case(&own);
    let is_it =
        |one: &Found| one.head.branch == branch && one.head.repo.as_ref().is_some_and(is_own);
    Ok(found.into_iter().filter(is_it).collect())
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
        let is_draft = self.order.needs_review || !self.order.before.is_empty();
        match self.create(&base, is_draft).await {
            // Somebody was faster, or we were and never heard of it.
            Err(error) if error.has(|reason| reason.message.contains(EXISTS)) => {
                let found = self.find(&base).await?;
                self.update(found.ok_or(Error::Unanswered(error.to_string()))?).await
            }
            // Not every plan has drafts. The text says that it is to be looked at.
            Err(error) if is_draft && error.to_string().contains(NO_DRAFTS) => {
                self.create(&base, false).await
            }
            created => created,
        }
    }

    /// The open pull request from the branch to `base`.
    async fn find(&self, base: &str) -> Result<Option<Found>, Error> {
        let more = format!("&base={}", encoded(base));
        let place = (self.repository, &self.order.head);
        let found = open(self.api, &self.token, place, &more).await?;
        Ok(found.into_iter().find(|one| one.base.branch == base))
    }

    async fn create(&self, base: &str, draft: bool) -> Result<Published, Error> {
        let title = text::title(&self.order.title, &format!("Changes from {}", self.order.head));
        let body = island::put(None, &self.order.run, &self.words(false)).unwrap_or_default();
        let head = self.order.head.to_string();
        let create = Create { title: &title, head, base, body: &body, draft };
        let address = path(self.repository, "/pulls");
        let created: Found =
            self.api.call(&self.token, Method::POST, &address, Some(&create)).await?;
        Ok(Published { number: created.number, url: created.html_url, is_new: true })
    }

    async fn update(&self, found: Found) -> Result<Published, Error> {
        let old = found.body.as_deref();
        let words = self.words(island::has_notice_of_another(old, &self.order.run));
        // Whoever has said that it is ready has not read a notice that is not there yet.
        if words.contains(NOTICE) && !island::has_notice_of(old, &self.order.run) {
            make_draft(self.api, &self.token, &found).await?;
        }
        let published = Published { number: found.number, url: found.html_url, is_new: false };
        let Some(body) = island::put(old, &self.order.run, &words) else {
            if words.contains(NOTICE) {
                return Err(Error::Full(published.url));
            }
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

    /// What the run has to say: the agent's words, and ours below them. What was there before is told of once.
    fn words(&self, is_told: bool) -> String {
        let Order { run, agent, moved: (from, to), .. } = self.order;
        let body = text::body(&self.order.body);
        let run = text::code(run);
        let agent =
            if agent.is_empty() { String::new() } else { format!(" of {}", text::code(agent)) };
        let from = if *from == Sha::NONE { "nothing".to_owned() } else { format!("`{from}`") };
        let before = if is_told { &[] } else { self.order.before.as_slice() };
        let notice = self.notice(&run, before);
        let gap = if body.is_empty() { "" } else { "\n\n" };
        format!("{body}{gap}Run {run}{agent} moved the branch from {from} to `{to}`.{notice}")
    }

    /// What stays for as long as there is room for anything: that somebody has to look, and below it, at what.
    fn notice(&self, run: &str, before: &[Reason]) -> String {
        let Order { needs_review, reasons, .. } = self.order;
        let headline = match (needs_review, before.is_empty()) {
            (false, true) => return String::new(),
            (true, true) => {
                format!("The changes of {run} touch what is protected: they need a review.")
            }
            (false, false) => {
                format!("Beside the changes of {run}, the branch has what needs a review.")
            }
            (true, false) => {
                format!("The changes of {run}, and the branch beside them, need a review.")
            }
        };
        let headline = format!("**{headline}**\n");
        let reasons: Vec<_> = reasons.iter().chain(before).collect();
        let listed = reasons.iter().take(MAX_REASONS).map(|Reason { path, why, .. }| {
            let path = path.as_ref().map(|path| text::code(path) + ": ").unwrap_or_default();
            format!("- {path}{}", text::body(why))
        });
        let left = reasons.len().saturating_sub(MAX_REASONS);
        let more = (left > 0).then(|| format!("- and {left} more"));
        let lines = ["\n".to_owned(), NOTICE.to_owned(), headline].into_iter();
        lines.chain(listed).chain(more).collect::<Vec<_>>().join("\n")
    }
}

const EXISTS: &str = "A pull request already exists";
const NO_DRAFTS: &str = "Draft pull requests are not supported";

/// REST can make a draft of nothing that is not one.
const TO_DRAFT: &str = "mutation($id: ID!) { convertPullRequestToDraft(input: {pullRequestId: $id}) { pullRequest { isDraft } } }";

/// More than that is read where the work is.
const MAX_REASONS: usize = 10;
