//! The models that an upstream says it has.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::headers::{self, Outgoing, Overwrites};
use super::{Call, Config, Upstream};
use crate::base::rope::SplicedBytes;
use crate::protocol::Route;
use crate::run::{Identity, RequestId};

/// Why it is not known which models there are.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Headers(#[from] headers::Invalid),
    #[error("the upstream's authorities cannot be loaded")]
    Authorities(#[from] io::Error),
    #[error(transparent)]
    Upstream(#[from] super::Error),
    #[error("the upstream has not told its models within {} s", TIMEOUT.as_secs())]
    Late,
    #[error("the upstream's answer is {0}, and no list of models")]
    Refused(StatusCode),
    #[error("the upstream's answer is no list of models")]
    Unreadable,
}

#[derive(Deserialize)]
struct List {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// Asks for the ids of all of them, in the upstream's order.
///
/// # Errors
/// It does not say.
pub async fn models(config: &Config) -> Result<Vec<String>, Error> {
    let deadline = Instant::now() + TIMEOUT;
    timeout_at(deadline, Box::pin(ask(config))).await.map_err(|_| Error::Late)?
}

async fn ask(config: &Config) -> Result<Vec<String>, Error> {
    let (upstream, of_nobody) = (Upstream::new(config)?, headers::Config::default());
    let overwrites = Arc::new(Overwrites::new(config, &Identity::default(), &of_nobody)?);
    let request = Request::new(());
    let head = Outgoing::new(Route::Models, &request, &of_nobody, overwrites, &RequestId::new());
    let response =
        upstream.send(Call { head, body: SplicedBytes::default(), deadline: None }).await?;
    if !response.status.is_success() {
        return Err(Error::Refused(response.status));
    }
    let body = Limited::new(response.body, MAX_BYTES).collect().await;
    let body = body.map_err(|_| Error::Unreadable)?.to_bytes();
    let list: List = serde_json::from_slice(&body).map_err(|_| Error::Unreadable)?;
    Ok(list.data.into_iter().map(|model| model.id).collect())
}

/// For the list. Ours: whoever needs it can do without.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Of the list. A thousand models are some hundred kilobytes.
const MAX_BYTES: usize = 4 << 20;
