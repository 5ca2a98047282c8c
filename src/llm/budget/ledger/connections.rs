//! The requests over a run's connections in its ledger: each reserves money, a place among the connection's requests and
//! the announced bytes of its body, all under the lock that LLM calls reserve under. Other bytes are taken as they pass.
//!
//! **Invariant:** a byte passes only after the ledger has taken it, so no order of requests passes more bytes than the
//! connection's limits.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::BudgetLedger;
use super::account_rate::AccountRate;
use crate::llm::budget::budget_error::BudgetError;
use crate::llm::budget::cost::Nanodollars;
use crate::llm::budget::rate::FREE_CALLS_PER_MINUTE;
use crate::llm::budget::usage::BudgetAmount;

/// The limits of one connection within a run. `None` means no limit beside the run's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ConnectionLimits {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// The maximum number of requests per minute; [`FREE_CALLS_PER_MINUTE`] if none is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_minute: Option<NonZeroU32>,
    /// The maximum number of bytes of all request bodies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_out: Option<u64>,
    /// The maximum number of bytes of all response bodies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_in: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<Nanodollars>,
}

impl ConnectionLimits {
    fn per_minute(&self) -> NonZeroU32 {
        let default = NonZeroU32::new(FREE_CALLS_PER_MINUTE).unwrap_or(NonZeroU32::MIN);
        self.per_minute.unwrap_or(default)
    }
}

/// The requests over a connection, their bytes and their cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionSpending {
    pub requests: u64,
    pub bytes_out: u64,
    pub bytes_in: u64,
    pub cost: Nanodollars,
}

/// The amount that one request reserves.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionReserveRequest<'a> {
    pub connection: &'a Arc<str>,
    pub price: Nanodollars,
    /// The announced length of the request's body; 0 if no length is announced.
    pub announced_bytes: u64,
    pub limits: ConnectionLimits,
}

/// The direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteDirection {
    /// The way from the agent to the server.
    Out,
    /// The way from the server to the agent.
    In,
}

/// The limit that prevents a request, or its next bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectionBudgetError {
    #[error(transparent)]
    Run(#[from] BudgetError),
    #[error("the connection's request budget is exhausted: {spent} of {limit} requests are spent")]
    Requests { spent: u64, limit: u64 },
    #[error(
        "the connection's byte budget is exhausted: {spent} of {limit} bytes {} the server are spent",
        match direction { ByteDirection::Out => "to", ByteDirection::In => "from" }
    )]
    Bytes { direction: ByteDirection, spent: u64, limit: u64 },
    #[error(
        "the connection's cost budget is exhausted: ${spent} of ${limit} are spent and this request needs ${needed}"
    )]
    Cost { spent: Nanodollars, limit: Nanodollars, needed: Nanodollars },
    #[error("open requests hold the rest of the connection's budget; retry when one has ended")]
    Reserved,
}

/// A reservation for one request. A reservation that is dropped unsettled is charged in full.
pub struct ConnectionReservation {
    ledger: Arc<BudgetLedger>,
    connection: Arc<str>,
    price: Nanodollars,
    limits: ConnectionLimits,
    /// The announced bytes that have not passed yet.
    held_bytes: u64,
    /// The bytes that have passed.
    passed: ConnectionSpending,
    is_open: bool,
}

/// The account of one connection.
#[derive(Debug)]
pub(super) struct ConnectionAccount {
    spent: ConnectionSpending,
    reserved: ConnectionSpending,
    rate: AccountRate,
}

impl ConnectionAccount {
    fn new(spent: ConnectionSpending, now: Instant) -> Self {
        let (reserved, rate) = (ConnectionSpending::default(), AccountRate::new(now));
        Self { spent, reserved, rate }
    }

    /// Checks the limits that requests use up. What is spent never comes back, so that refusal is final. What open
    /// requests hold may come back.
    fn check_limits(
        &self,
        request: &ConnectionReserveRequest<'_>,
    ) -> Result<(), ConnectionBudgetError> {
        let Self { spent, reserved, .. } = self;
        let ConnectionReserveRequest { price: needed, announced_bytes, limits, .. } = *request;
        if let Some(limit) = limits.requests {
            if spent.requests >= limit {
                return Err(ConnectionBudgetError::Requests { spent: spent.requests, limit });
            }
            if spent.requests + reserved.requests >= limit {
                return Err(ConnectionBudgetError::Reserved);
            }
        }
        if let Some(limit) = limits.cost_usd {
            if spent.cost + needed > limit {
                return Err(ConnectionBudgetError::Cost { spent: spent.cost, limit, needed });
            }
            if spent.cost + reserved.cost + needed > limit {
                return Err(ConnectionBudgetError::Reserved);
            }
        }
        // No byte is left, so no response could pass.
        check_bytes(ByteDirection::In, spent.bytes_in, 1, limits.bytes_in)?;
        check_bytes(ByteDirection::Out, spent.bytes_out, announced_bytes, limits.bytes_out)?;
        let held = spent.bytes_out.saturating_add(reserved.bytes_out);
        check_bytes(ByteDirection::Out, held, announced_bytes, limits.bytes_out)
            .map_err(|_| ConnectionBudgetError::Reserved)
    }
}

fn check_bytes(
    direction: ByteDirection,
    spent: u64,
    needed: u64,
    limit: Option<u64>,
) -> Result<(), ConnectionBudgetError> {
    match limit {
        Some(limit) if spent.saturating_add(needed) > limit => {
            Err(ConnectionBudgetError::Bytes { direction, spent, limit })
        }
        _ => Ok(()),
    }
}

impl BudgetLedger {
    /// Checks that the run's time is not over, for work that is charged later.
    ///
    /// # Errors
    /// Returns an error if the deadline has passed.
    pub fn check_time(&self) -> Result<(), ConnectionBudgetError> {
        Ok(self.check_deadline(&self.lock_state().limits)?)
    }

    /// Reserves everything that a request needs, or nothing.
    ///
    /// # Errors
    /// Returns the limit that prevents the request. Permanent limits take precedence over temporary ones.
    pub fn reserve_connection_request(
        self: &Arc<Self>,
        request: &ConnectionReserveRequest<'_>,
    ) -> Result<ConnectionReservation, ConnectionBudgetError> {
        let (mut guard, now) = (self.lock_state(), Instant::now());
        let state = &mut *guard;
        self.check_deadline(&state.limits)?;
        state.check_price(request.price)?;
        let account = state.connections.entry(Arc::clone(request.connection));
        let account =
            account.or_insert_with(|| ConnectionAccount::new(ConnectionSpending::default(), now));
        account.check_limits(request)?;
        // Rates, which take from their buckets, so every other check comes before them.
        let limit = Some(request.limits.per_minute());
        account.rate.check_available("requests over this connection", limit, now)?;
        account.rate.take_request(now);
        // Reserve. Nothing can fail from here on.
        account.reserved.requests += 1;
        account.reserved.cost = account.reserved.cost + request.price;
        let held = &mut account.reserved.bytes_out;
        *held = held.saturating_add(request.announced_bytes);
        state.reserved.cost = state.reserved.cost + request.price;
        drop(guard);
        Ok(ConnectionReservation {
            ledger: Arc::clone(self),
            connection: Arc::clone(request.connection),
            price: request.price,
            limits: request.limits,
            held_bytes: request.announced_bytes,
            passed: ConnectionSpending::default(),
            is_open: true,
        })
    }

    /// Sets what earlier processes of the run have spent over each connection. The costs are part of
    /// [`PriorUsage::spent`](super::PriorUsage::spent) already. `recent` has the requests of the last minute.
    pub fn restore_connections(
        &self,
        spent: impl IntoIterator<Item = (String, ConnectionSpending)>,
        recent: impl IntoIterator<Item = (String, u64)>,
    ) {
        let (mut state, now) = (self.lock_state(), Instant::now());
        for (connection, spent) in spent {
            state.connections.insert(connection.into(), ConnectionAccount::new(spent, now));
        }
        for (connection, requests) in recent {
            let account = state.connections.entry(connection.into());
            let account = account
                .or_insert_with(|| ConnectionAccount::new(ConnectionSpending::default(), now));
            account.rate.set_recent(requests, now);
        }
    }

    /// Returns what was spent over each connection. Amounts that open requests hold reserved count as spent.
    pub fn connection_spending(&self) -> BTreeMap<Arc<str>, ConnectionSpending> {
        let state = self.lock_state();
        let total =
            |ConnectionAccount { spent, reserved, .. }: &ConnectionAccount| ConnectionSpending {
                requests: spent.requests + reserved.requests,
                bytes_out: spent.bytes_out.saturating_add(reserved.bytes_out),
                bytes_in: spent.bytes_in.saturating_add(reserved.bytes_in),
                cost: spent.cost + reserved.cost,
            };
        state.connections.iter().map(|(name, own)| (Arc::clone(name), total(own))).collect()
    }
}

impl ConnectionReservation {
    /// Returns the amount that the request may spend.
    pub fn granted_amount(&self) -> BudgetAmount {
        BudgetAmount { cost: self.price, ..BudgetAmount::default() }
    }

    /// Returns the bytes that have passed.
    pub fn passed_bytes(&self) -> ConnectionSpending {
        self.passed
    }

    /// Takes bytes that are about to pass.
    ///
    /// # Errors
    /// Returns an error if the connection's limit does not allow these bytes, or the reservation is settled. Nothing
    /// is taken then.
    pub fn take_bytes(
        &mut self,
        direction: ByteDirection,
        count: u64,
    ) -> Result<(), ConnectionBudgetError> {
        if !self.is_open {
            return Err(ConnectionBudgetError::Reserved);
        }
        let mut state = self.ledger.lock_state();
        let Some(account) = state.connections.get_mut(&self.connection) else {
            return Err(ConnectionBudgetError::Reserved);
        };
        match direction {
            ByteDirection::Out => {
                // The announced bytes are reserved already. A body without a length has reserved none.
                let held = self.held_bytes.min(count);
                let open = account.spent.bytes_out.saturating_add(account.reserved.bytes_out);
                check_bytes(direction, open, count - held, self.limits.bytes_out)?;
                account.reserved.bytes_out = account.reserved.bytes_out.saturating_sub(held);
                account.spent.bytes_out = account.spent.bytes_out.saturating_add(count);
                self.held_bytes -= held;
                self.passed.bytes_out += count;
            }
            ByteDirection::In => {
                check_bytes(direction, account.spent.bytes_in, count, self.limits.bytes_in)?;
                account.spent.bytes_in = account.spent.bytes_in.saturating_add(count);
                self.passed.bytes_in += count;
            }
        }
        Ok(())
    }

    /// Charges the request's price and counts the request. Later calls change nothing.
    pub fn settle_request(&mut self) -> BudgetAmount {
        let charged = self.granted_amount();
        self.close(1, charged.cost);
        charged
    }

    /// Gives the whole reservation back. The caller has proof that nothing was sent.
    pub fn release_unspent(mut self) {
        self.release_request();
    }

    /// Gives the whole reservation back, with the bytes that were taken. The caller has proof that nothing was sent. Later
    /// calls change nothing.
    pub fn release_request(&mut self) -> BudgetAmount {
        self.close(0, Nanodollars::ZERO);
        BudgetAmount::default()
    }

    /// Replaces the reservation by a charge, under one lock.
    fn close(&mut self, requests: u64, cost: Nanodollars) {
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        let mut state = self.ledger.lock_state();
        state.reserved.cost = state.reserved.cost.saturating_sub(self.price);
        state.spent.cost = state.spent.cost + cost;
        if let Some(account) = state.connections.get_mut(&self.connection) {
            let ConnectionAccount { spent, reserved, .. } = account;
            reserved.requests = reserved.requests.saturating_sub(1);
            reserved.cost = reserved.cost.saturating_sub(self.price);
            reserved.bytes_out = reserved.bytes_out.saturating_sub(self.held_bytes);
            if requests == 0 {
                // The bytes were taken when they were read, before there was a connection to send them over.
                let passed = std::mem::take(&mut self.passed);
                spent.bytes_out = spent.bytes_out.saturating_sub(passed.bytes_out);
            }
            spent.requests += requests;
            spent.cost = spent.cost + cost;
        }
        drop(state);
        // An LLM call may wait for the money that this request has held.
        self.ledger.closed.notify_one();
    }
}

impl Drop for ConnectionReservation {
    fn drop(&mut self) {
        // The request's task was dropped or has panicked. The server may have received it, so it is charged.
        self.close(1, self.price);
    }
}

impl fmt::Debug for ConnectionReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionReservation")
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

impl ConnectionSpending {
    /// Adds the amounts of another part of the connection's use.
    pub fn add_spending(&mut self, other: Self) {
        self.requests += other.requests;
        self.bytes_out = self.bytes_out.saturating_add(other.bytes_out);
        self.bytes_in = self.bytes_in.saturating_add(other.bytes_in);
        self.cost = self.cost + other.cost;
    }
}

impl ConnectionBudgetError {
    /// Returns the stable code that clients, metrics and the audit log receive.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Run(BudgetError::Deadline { .. }) => "deadline_exceeded",
            Self::Run(BudgetError::Rate { .. }) => "rate_limited",
            Self::Run(BudgetError::Reserved { .. }) | Self::Reserved => "budget_reserved",
            Self::Run(_) => "cost_budget_exhausted",
            Self::Requests { .. } => "connection_request_budget_exhausted",
            Self::Bytes { .. } => "connection_byte_budget_exhausted",
            Self::Cost { .. } => "connection_cost_budget_exhausted",
        }
    }

    /// Returns true if the same request cannot be admitted later either.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Requests { .. } | Self::Bytes { .. } | Self::Cost { .. } => true,
            Self::Run(error) => {
                error.is_permanent() || matches!(error, BudgetError::Deadline { .. })
            }
            Self::Reserved => false,
        }
    }
}
