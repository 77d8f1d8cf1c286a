/*
 * The metadata lock of the ring: acquire, steal, attach, with processes that die anywhere and come back.
 *
 * place[i] is the lock byte of participant i: 0, or 1 + the process that holds it; the kernel clears it when
 * that process is dead. word is the futex word: 0, or 1 + the participant that owns the metadata lock. dirty
 * says that the tables are half-changed.
 *
 *   spin -run -safety lock.pml                no errors: two processes are never inside, nobody acquires the lock of
 *                                             a dead process without recovery, nobody waits for ever
 *   spin -run -safety -DNO_SEIZE lock.pml     must fail: probing without keeping the byte, a participant can come
 *                                             back between the probe and the exchange
 *   spin -run -safety -DNO_HEIR lock.pml      must fail: a newcomer that does not look whether the word names it
 */
#ifndef DEATHS
#define DEATHS 3
#endif
#define PROCESSES 2
#define PLACES 2
#define ROUNDS 2

byte place[PLACES];
byte word = 0;
byte inside = 0;
byte deaths_left = DEATHS;
bool dirty = false;
bool dying[PROCESSES];

inline attach() {
  if
  :: atomic { place[0] == 0 -> place[0] = id + 1; me = 0 }
  :: atomic { place[0] != 0 && place[1] == 0 -> place[1] = id + 1; me = 1 }
  fi;
#ifndef NO_HEIR
  if
  :: word == me + 1 -> dirty = false; word = 0   /* rebuild, release */
  :: else
  fi
#endif
}

/* A waiter sleeps until the word is free or, at its time-out, its owner looks dead. */
inline acquire() {
  stolen = false; got = false;
  do
  :: got -> break
  :: !got && word == 0 ->
     atomic { if :: word == 0 -> word = me + 1; got = true; inside_me = true :: else fi }
  :: !got && word != 0 && word != me + 1 && place[word - 1] == 0 ->
     owner = word;
     if
     :: owner == 0
     :: owner != 0 ->
#ifdef NO_SEIZE
        seized = (place[owner - 1] == 0);
#else
        atomic { if :: place[owner - 1] == 0 -> place[owner - 1] = id + 1; seized = true :: else seized = false fi };
#endif
        if
        :: seized ->
           atomic { if :: word == owner -> word = me + 1; got = true; stolen = true; inside_me = true :: else fi };
#ifndef NO_SEIZE
           place[owner - 1] = 0;
#endif
        :: else
        fi
     fi
  od
}

proctype process(byte id) {
  byte me = 0, owner = 0, rounds = ROUNDS;
  bool stolen = false, got = false, seized = false, inside_me = false, counted = false;
again:
  {
    attach();
    do
    :: rounds == 0 -> break
    :: rounds > 0 ->
       acquire();
       atomic { inside++; counted = true; assert(inside == 1) };
       if
       :: stolen -> dirty = false             /* rebuild */
       :: else -> assert(!dirty)
       fi;
       dirty = true;                          /* the operation, half done */
       dirty = false;
       atomic { inside--; counted = false };
       atomic { word = 0; inside_me = false };
       rounds--
    od;
    place[me] = 0;
    goto done
  } unless { dying[id] };
  /* the kernel: it is inside no longer, and its bytes are given back one by one */
  atomic {
    if :: counted -> inside--; counted = false :: else fi;
    inside_me = false;
    dying[id] = false
  };
  owner = 0;
  do
  :: owner < PLACES ->
     atomic { if :: place[owner] == id + 1 -> place[owner] = 0 :: else fi; owner++ }
  :: else -> break
  od;
  owner = 0; me = 0; seized = false; stolen = false; got = false;
  goto again;
done:
  skip
}

proctype killer() {
  byte victim;
end:
  do
  :: deaths_left > 0 ->
     select(victim : 0 .. PROCESSES - 1);
     atomic { dying[victim] = true; deaths_left-- }
  :: break
  od
}

init {
  atomic { run process(0); run process(1); run killer() }
}
